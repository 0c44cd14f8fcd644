"""Storage plugins, imported as `snapshot.plugins`. The core never imports this package but through the registry."""
