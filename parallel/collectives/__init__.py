"""The exchanges between the ranks of one group: one interface and its implementations."""
