"""Sandboxes in Daytona's cloud, through the vendor's SDK (the extra ``daytona``)."""
