"""From a placed training step to one rank's program, and from that to a readable Python file."""
