"""gRPC edges of the agent: the only place that imports grpc, and where protobuf types stop."""
