"""Deprecated: the names of this module have moved."""

from snapshot.plugins.moved import forward

__getattr__ = forward(
    __name__,
    {
        "ObjectStorage": "snapshot.plugins.objectstore.object_storage:ObjectStorage",
        "Driver": "snapshot.plugins.objectstore.driver:Driver",
        "Page": "snapshot.plugins.objectstore.driver:Page",
    },
)
