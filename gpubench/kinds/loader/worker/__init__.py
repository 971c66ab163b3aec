"""What runs in place of a program whose dataset alone is given."""
