"""Deprecated: the names of this module have moved."""

from snapshot.plugins.moved import forward

__getattr__ = forward(
    __name__,
    {
        "PassingError": "snapshot.plugins.network.retry:TransientError",
        "Patience": "snapshot.plugins.network.retry:RetryPolicy",
        "Attempt": "snapshot.plugins.network.retry:Attempt",
        "patiently": "snapshot.plugins.network.retry:retry_request",
        "Sink": "snapshot.plugins.network.transfer:ResponseSink",
        "Scatter": "snapshot.plugins.network.transfer:BufferSink",
        "Whole": "snapshot.plugins.network.transfer:BytesSink",
        "Body": "snapshot.plugins.network.transfer:RequestBody",
    },
)
