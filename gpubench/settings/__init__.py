"""The settings of every command: their schema, how they are read, and what fills them in."""
