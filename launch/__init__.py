"""How processes come to be: launchers, the supervisor, the command line. The only place that reads the environment."""
