"""The schemes behind `fedloom.data.partition`: one file for each way of deciding who holds what."""
