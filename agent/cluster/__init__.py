"""The member cluster as it stands: records, arrays and where they come from."""
