"""The rules that turn a profile or a memory footprint into findings; each is a function of a case.

>>> from pathlib import Path
>>> from gpubench.diagnosis.rules import of_files
>>> diagnosis = of_files([Path("trace.json")])  # one trace for each rank
>>> diagnosis.findings.headline
'GPU idle 63 %: 95 % of it waits for the data loader'
>>> [(finding.id, finding.severity) for finding in diagnosis.findings.findings]
[('data-loading', 'high')]
"""
