"""Reading and mixing the streams of Hyper-Connections."""
