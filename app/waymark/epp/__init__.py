"""Selection over gRPC: Envoy's endpoint picker (ext_proc), health, and the scores that other routers ask for."""
