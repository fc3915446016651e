"""What compare.py is made of: arms → engine → runs → analysis → report."""
