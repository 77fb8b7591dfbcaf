"""The gRPC services that the kubelet calls, and the sockets on which they listen."""
