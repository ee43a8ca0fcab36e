-- note_activity(activity; length, entry*) -> {verdict, 0}
--
-- Add entries to the activity list, which GET /activity shows.
--
-- KEYS  activity  stream  entries, the oldest of which are trimmed
-- ARGV  length    about how many entries are kept
--       entry*    JSON objects, at most 100
--
-- {'applied', 0}  added

for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'entry', ARGV[i]) end
return {'applied', 0}
