-- ARGV: fence, tickets finished above `low`. Returns 0, or -1 if fenced.
if redis.call('HGET', ST, 'fence') ~= ARGV[1] then return -1 end
local low, issued = num('low'), num('issued')
for i = 2, #ARGV do
  local ticket = tonumber(ARGV[i])
  if ticket > low then redis.call('SADD', DONE, ARGV[i]) end
  issued = math.max(issued, ticket)
end
redis.call('HSET', ST, 'issued', issued)
return 0
