"""The kubelet's gRPC protocols; ``generated/`` comes from the .proto files through ``make protocol``."""
