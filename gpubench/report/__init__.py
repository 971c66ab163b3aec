"""What people see of a run or a comparison: in the terminal, as Markdown, as a page."""
