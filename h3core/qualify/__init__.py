"""The suite's own library: comparisons that return evidence, probes, rank tasks and the pytest plugin.

The runtime never imports it.
"""
