"""Policies as programs that need neither Sebulba nor the agent: StableHLO and ONNX."""
