"""From a command line and YAML to a configuration."""
