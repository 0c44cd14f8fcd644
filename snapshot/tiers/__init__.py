"""Near and far: steps on each host, replicas on other hosts, and uploads to the storage that all hosts share."""
