"""Functions of exports in the formats of other libraries: ONNX, LiteRT and TensorFlow."""
