"""What a run leaves behind: report.json, and the forms of it for people and for CI.

`schema` and `validate` say what a report is, `files` reads and writes reports, `markdown`, `html`, `junit` and `github`
put one into words, `compare` holds two against each other, `cli` is `python -m h3core report`. Nothing here needs torch
or pytest: a report can be read on any machine.
"""
