import engine, jobs
def run(words):
    with engine.open(words[1]) as e:
        jobs.make_vault(e, 86400)
