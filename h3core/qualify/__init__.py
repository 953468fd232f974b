"""The suite: it qualifies a machine with the runtime, which never imports it.

`checks` compares, `controls` plants faults, `preflight` looks at the machine, `report` writes down. The modules here
run a session of pytest: `plugin`, `opening`, `recorder` and `closing` in that order; `manifest` says what is required
and `verdict` what it amounts to.
"""
