"""From what was measured to what is wrong: rules, each a small function from a case to a finding."""
