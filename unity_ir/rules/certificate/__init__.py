"""Certificates of substitutions: proofs as plain data, and the small checker that replays them."""
