"""Registers h3core's pytest plugin; everything else lives in h3core.qualify."""

pytest_plugins = ["h3core.qualify.plugin"]
