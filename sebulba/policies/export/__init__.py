"""A saved policy as a program for other runtimes: StableHLO and ONNX."""
