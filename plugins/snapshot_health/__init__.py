"""The health of a run: guards of a take, statistics of tensors, reports, and OpenTelemetry."""
