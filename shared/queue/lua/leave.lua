-- ARGV: fence. The present trainer stops in order: what it held caused no crash. Returns 0, or -1 if fenced.
if redis.call('HGET', ST, 'fence') ~= ARGV[1] then return -1 end
redis.call('HSET', ST, 'progressed', 1)
return 0
