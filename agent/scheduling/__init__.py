"""The decision path of a member: rules, decisions, guard, queue and the extender."""
