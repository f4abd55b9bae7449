"""The models: one shared decoder body, one small file per family, and the registry from architecture to class."""
