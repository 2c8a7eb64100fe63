"""Files of arrays that other libraries wrote: checkpoints of TensorFlow, and files of PyTorch, Keras and HDF5."""
