"""What people see of a run or a comparison: in the terminal, as Markdown, as a page.

A report is a `Document`. `terminal`, `markdown` and `page` show it, each in its own way.

>>> from gpubench.report import markdown
>>> from gpubench.report.document import Document, Paragraph
>>> document = Document("784 samples/s", [Paragraph("3 repeats of 500 steps")])
>>> markdown.render(document).splitlines()
['### 784 samples/s', '', '- 3 repeats of 500 steps']
"""
