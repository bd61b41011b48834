"""Makes and serves the agent's gRPC calls. Protobuf types are used here and in the transports only."""
