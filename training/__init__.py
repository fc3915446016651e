"""What train.py is made of, one subject a file. Nothing here calls back into the loop: train.py calls these."""
