-- keep_response(response, queue; name, milliseconds, value, group, length) -> {verdict, 0}
--
-- Keep the answer to a request of the Responses API, or delete one. With a group, what was done is queued for MongoDB.
--
-- KEYS  response      string, PX  the stored response; empty: it is deleted, and MongoDB may not know it yet
--       queue         stream      names of responses to be copied, each once for every change
-- ARGV  name          32 hex digits of the response
--       milliseconds  how long it is kept
--       value         the response; empty: it is deleted
--       group         the consumer group of the queue; empty: there is no MongoDB
--       length        how many names are queued at most, about
--
-- {'applied', 0}  done

local value, group = ARGV[3], ARGV[4]
if value == '' and group == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
end
if group ~= '' then
  if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('XGROUP', 'CREATE', KEYS[2], group, '0', 'MKSTREAM') end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'response', ARGV[1])
end
return {'applied', 0}
