"""An engine as a process: started, hooked, shown its share of a GPU, spoken to over HTTP."""
