"""What is known of a diffusion run without torch: what it is asked for, who does which steps, and what was seen."""
