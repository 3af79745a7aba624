"""How each launcher spells a job and a plan: one file a launcher, which writes its files and reads them back."""
