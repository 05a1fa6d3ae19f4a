def listing(jobs):
    return "\n".join(f"{j.name} {j.finished} {j.overrides}" for j in jobs)
