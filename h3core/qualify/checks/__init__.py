"""What checks are made of: the one comparison that returns evidence, tasks that ranks run, and probes.

`compare` is what every check and every control is judged by; `transport`, `blocks`, `shards`, `loop` and `determinism`
hold tasks for ranks; `parity`, `traffic` and `invariance` say what is expected of them.
"""
