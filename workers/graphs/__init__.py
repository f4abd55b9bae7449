"""Graphs: a step that was captured once at a padded size and is replayed without running model code again."""
