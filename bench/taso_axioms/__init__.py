"""Known statements about operators, each with the verdict it must have: TASO's, parallel ones, and their use by Z3."""
