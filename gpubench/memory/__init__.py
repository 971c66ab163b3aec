"""What fills a device's memory: allocations in their order, whatever recorded or predicted them, and what they add up
to. Nothing here needs torch."""
