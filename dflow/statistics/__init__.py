"""Statistics of data sets, by one process or shared by workers, and layers made of them."""
