-- end_responses(queue; group, id*) -> {verdict, 0}
--
-- Take entries out of the queue whose responses are copied.
--
-- KEYS  queue  stream  names of responses
-- ARGV  group  the consumer group
--       id*    ids of entries, at most 1,000
--
-- {'applied', 0}  they are gone

for i = 2, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
return {'applied', 0}
