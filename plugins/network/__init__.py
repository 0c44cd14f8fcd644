"""What storages over a network share: retries, and bodies that are sent and received without extra copies."""
