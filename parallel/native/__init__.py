"""C sources, and what compiles them when they are first used."""
