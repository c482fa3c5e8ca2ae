"""Parsing of command lines and YAML files into a configuration."""
