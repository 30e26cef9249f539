"""The agent of one member cluster: scheduling, learning and its end of the federation link."""
